"""The captions of a report: what each section shows, how to read it, and what would be unusual."""

from __future__ import annotations

from unsum.report.flags import GROWN, SHRUNK
from unsum.report.frame import caption

FINDINGS = caption(
    "Layers, samples and parameters of this batch that meet one of the rules under “Flags: what they mean”.",
    "each line names a place and says what was found there; a link leads to the layer's row. A flag is a reason to "
    "look, not yet an error.",
)

SAMPLES = caption(
    "How much each sample changes the weights: the norm of its gradient, taken over all parameters, before the "
    "gradients of the batch are summed.",
    "one bar for each sample, in the order of the batch; a hatched one is NaN or infinite. The table has the largest "
    "first. Pick a bar, a row or a line "
    "of tokens to see the sample's loss, the samples most like it and the parameters that it changes most.",
    "a sample above the dashed line. It changes the weights more than the others do: it is often mislabelled, damaged, "
    "or rare.",
)

SIMILARITY = caption(
    "Whether samples change the weights in the same direction: the cosine between the gradients of every two samples.",
    "row and column are samples, in the order of the batch. Coral (1): both ask for the same change. No colour (0): "
    "they have nothing to do with each other. Blue (−1): one undoes the other. The diagonal is each sample with "
    "itself.",
    "two samples close to 1 off the diagonal are often duplicates; a row that is blue all along works against the "
    "rest of the batch and may have a wrong label.",
)

DEPTH = caption(
    "How large the gradient is on its way back through the model: one point for each layer, in the order of the "
    "forward, the first layer on the left.",
    "backward runs from right to left. The line is the norm of the gradient that arrives at a layer's output, a dot "
    "that of the gradient of the layer's own parameters, which the optimizer gets. A layer is a module without "
    "modules in it. A click leads to its row in the table.",
    f"a line that falls steadily towards the left (vanishing: below {SHRUNK:g} of the last layer's) or rises "
    f"(exploding: above {GROWN:,.0f} times). Steps up and down between neighbours of different kinds are normal.",
)

LAYERS = caption(
    "Every module that was called, in the order of the forward: the values that it returned (activation), the "
    "gradient that came back to them, and the norms of its own parameters and of their gradient.",
    "a histogram runs from the smallest value to the largest, which are written below it; heights are square roots of "
    "counts, so that tails can be seen. “zeros” is the share of values that are exactly 0. A heading sorts.",
    "NaN, a standard deviation near 0, nearly all zeros, or a norm far from those of similar layers.",
)

PICTURE = caption(
    "The graph that autograd has recorded: from the batch at the top to the sum of the losses at the bottom.",
    "grey boxes are data, teal ones parameters, purple ones results. Grey arrows run forward. Coral arrows are "
    "gradients coming back, with their norms: solid where the gradient is stored in <code>.grad</code>, dashed where "
    "it is computed, used and thrown away.",
    "a parameter that no coral arrow reaches: it is not trained.",
)

COVERAGE = caption(
    "Where each parameter meets data in the forward, and how its per-sample gradients were computed there.",
    "a named rule uses the factors of the gradient (a layer's input and the gradient at its output); “replay” runs the "
    "operation's backward again for each sample, which is as exact and slower.",
    "“nothing”: the parameter was not used in this batch.",
)

CHECK = caption(
    "The per-sample gradients, compared with those of plain autograd, which differentiates each sample's loss by "
    "itself.",
    "the error is the largest distance of any sample's gradient, divided by the norm of the largest gradient of a "
    "sample. Rounding alone gives about 1e−7 in float32.",
)


def tokens(on: str, left_out: str) -> str:
    """`on`: which token has a position's colour. `left_out`: parameters that have no positions."""
    return caption(
        "How much each position contributes: the norm of its part of the sample's gradient.",
        f"one line for each sample; the stronger the colour, the larger the norm, and the number shows under the "
        f"pointer.{on}{left_out}",
        "one token whose colour is far stronger than in the rest of its sample: the model finds it hard to predict, or "
        "it is out of place.",
    )
