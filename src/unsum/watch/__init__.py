"""Watching a training run: `unsum.watch`, its records, and where they go."""

from unsum.watch.record import Layer as Layer
from unsum.watch.record import NonFinite as NonFinite
from unsum.watch.record import Record as Record
from unsum.watch.watch import Watch as Watch
from unsum.watch.watch import watch as watch
