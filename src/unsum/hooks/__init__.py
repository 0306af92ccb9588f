"""The only package that registers anything with PyTorch: hooks on modules and tensors (`registering`), the watching of
`calls`, and the catching of `backward` for the `blocks` that are open.

Everything here is undone by what it returns, or by `close`; nothing is active while no block is open.
"""

from unsum.hooks.blocks import Backward as Backward
from unsum.hooks.blocks import Block as Block
from unsum.hooks.blocks import alone as alone
from unsum.hooks.blocks import are_here as are_here
from unsum.hooks.blocks import aside as aside
from unsum.hooks.blocks import close_block as close_block
from unsum.hooks.blocks import here as here
from unsum.hooks.blocks import instead_of_backward as instead_of_backward
from unsum.hooks.blocks import none_open as none_open
from unsum.hooks.blocks import open_block as open_block
from unsum.hooks.calls import NOTHING as NOTHING
from unsum.hooks.calls import is_compiled as is_compiled
from unsum.hooks.calls import on_calls as on_calls
from unsum.hooks.registering import Handle as Handle
from unsum.hooks.registering import Hook as Hook
from unsum.hooks.registering import after_node as after_node
from unsum.hooks.registering import exactly as exactly
from unsum.hooks.registering import inert as inert
from unsum.hooks.registering import is_batched as is_batched
from unsum.hooks.registering import is_dead as is_dead
from unsum.hooks.registering import off_plain_call as off_plain_call
from unsum.hooks.registering import on_call as on_call
from unsum.hooks.registering import on_gradient as on_gradient
from unsum.hooks.registering import on_node as on_node
from unsum.hooks.registering import on_nodes as on_nodes
from unsum.hooks.registering import on_plain_call as on_plain_call
from unsum.hooks.registering import unwatch as unwatch
from unsum.hooks.registering import watch as watch
from unsum.hooks.tracing import is_traced as is_traced
from unsum.hooks.tracing import refuse_tracing as refuse_tracing
