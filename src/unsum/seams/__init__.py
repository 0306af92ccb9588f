"""The only package that touches torch's insides: what it calls by private names, and what it replaces while a block is
open. When torch changes, this package changes.

`modules`, `tensors`, `nodes`: hooks on each, and what torch says of them only in private; `engine`: the blocks that are
open, and the catching of `backward`; `modes`: what sees every call; `checkpoints`, `storage`, `tracing`: where we are.
Everything here is undone by what it returns, or by `close`; nothing is active while no block is open.
"""

from unsum.seams.engine import Backward as Backward
from unsum.seams.engine import Block as Block
from unsum.seams.engine import alone as alone
from unsum.seams.engine import are_here as are_here
from unsum.seams.engine import aside as aside
from unsum.seams.engine import close_block as close_block
from unsum.seams.engine import here as here
from unsum.seams.engine import inside as inside
from unsum.seams.engine import instead_of_backward as instead_of_backward
from unsum.seams.engine import is_alone_at_parameters as is_alone_at_parameters
from unsum.seams.engine import is_narrow as is_narrow
from unsum.seams.engine import none_open as none_open
from unsum.seams.engine import open_block as open_block
from unsum.seams.hook import Handle as Handle
from unsum.seams.hook import Hook as Hook
from unsum.seams.hook import inert as inert
from unsum.seams.modes import exactly as exactly
from unsum.seams.modes import unwatch as unwatch
from unsum.seams.modes import watch as watch
from unsum.seams.modules import NOTHING as NOTHING
from unsum.seams.modules import called_after as called_after
from unsum.seams.modules import has_hooks_around as has_hooks_around
from unsum.seams.modules import hear_of_backwards as hear_of_backwards
from unsum.seams.modules import is_compiled as is_compiled
from unsum.seams.modules import off_call as off_call
from unsum.seams.modules import on_call as on_call
from unsum.seams.modules import on_calls as on_calls
from unsum.seams.modules import other_hooks as other_hooks
from unsum.seams.nodes import after_node as after_node
from unsum.seams.nodes import on_node as on_node
from unsum.seams.nodes import on_nodes as on_nodes
from unsum.seams.tensors import TensorHook as TensorHook
from unsum.seams.tensors import is_batched as is_batched
from unsum.seams.tensors import on_gradient as on_gradient
from unsum.seams.tracing import is_traced as is_traced
from unsum.seams.tracing import refuse_capturing as refuse_capturing
from unsum.seams.tracing import refuse_tracing as refuse_tracing
