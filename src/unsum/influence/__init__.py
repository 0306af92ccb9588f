"""Which training examples taught the model this?"""

from unsum.influence.influence import influence
from unsum.influence.scores import Influence

__all__ = ["Influence", "influence"]
