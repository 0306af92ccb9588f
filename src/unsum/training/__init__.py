"""In training: `unsum.watch`, its records, and where they go."""

from unsum.training import sinks as sinks
from unsum.training.record import Layer as Layer
from unsum.training.record import NonFinite as NonFinite
from unsum.training.record import Record as Record
from unsum.training.watch import Watch as Watch
from unsum.training.watch import watch as watch
