"""In training: `unsum.watch`, its records, and where they go; `unsum.clip_per_sample` and `unsum.private`."""

from unsum.training import sinks as sinks
from unsum.training.clip import Clipped as Clipped
from unsum.training.clip import clip_per_sample as clip_per_sample
from unsum.training.private import Private as Private
from unsum.training.private import private as private
from unsum.training.record import Layer as Layer
from unsum.training.record import NonFinite as NonFinite
from unsum.training.record import Record as Record
from unsum.training.recorder import Watch as Watch
from unsum.training.watch import watch as watch
