"""Compiled models: the same rules through a tap.

`torch.compile` makes a whole model one opaque node of the graph. But while it compiles, torch runs the model once with
stand-ins for tensors, differentiates the graph of ordinary nodes that this leaves, and writes down every operation.
There the rules speak: hooks on these nodes turn δ and what the node has saved into factors, as in any backward, and
reducers turn the factors into numbers; all of it is written down with the rest and compiled. The numbers leave as the
"gradients" of additional inputs, the taps.

Whose each position is cannot be learnt from stand-ins. So the first batch of a layout runs eagerly and is learnt as
ever; later ones run compiled, if the nodes that torch writes down are those that were learnt.

- `pattern`: what was learnt of a call, so that the nodes can be recognised
- `raw_inputs`: what is done to inputs before the first node
- `parts`: the same of a model with graph breaks, of which torch compiles part by part
- `reducers.tap` and the reducers: how each takes its numbers through taps
- `instrument`: what happens while torch writes down
- `kept_factors`: factors that leave by an operator
- `outlets`: parts with taps of their own, and the order in which they run
- `beside`: layers outside all parts
- `rehearsal`: the eager calls of which is learnt
- `traced_sites`: captures, by hooks that torch reads; what is known of such a graph is `traced`, and a `site_session`
  sees its tensors while torch writes down
- `tapping`: the calls of a block: eager or compiled
- `tapped_backwards`: their backwards, each of a call that was `tapped`, and what has left
"""
