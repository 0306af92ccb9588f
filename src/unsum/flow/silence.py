"""Why a site that was asked for never fired, and the error at the end of a block that says so."""

from __future__ import annotations

import difflib

from torch import nn

from unsum.errors import SiteError
from unsum.flow.flow import Flow
from unsum.sites import Names, Place, Site, is_container


def complain(flow: Flow, fired: set[int], what: str) -> None:
    """Raise for every request that no place has answered, saying why. `what` should have been done with it."""
    lines = [_line(flow, number) for number in range(len(flow.requests.asked)) if number not in fired]
    if lines:
        raise SiteError("\n".join([*lines, f'  missing="ignore" accepts sites that are never {what}']))


def _line(flow: Flow, number: int) -> str:
    site, places = flow.requests.asked[number], list(flow.requests.places[number].values())
    if not places:
        near = difflib.get_close_matches(str(site), [f"{name}:{site.kind}" for name in flow.requests.marked], 3, 0.3)
        name = flow.requests.mark_in(site)
        return f"{site}: no tensor was marked with this name in this block" + (
            f"; near: {', '.join(map(repr, near))}" if near else f"; mark one: y = unsum.mark(y, {name!r})"
        )
    reason = why(flow, places[0], site)
    if len(places) == 1:
        return f"{site}: never fired: {reason}"
    return f"{site}: none of the {len(places)} sites that it names ever fired; {places[0].name}: {reason}"


def why(flow: Flow, place: Place, site: Site) -> str:
    """Why a place that was asked for has not fired."""
    calls = flow.calls.count(place)
    if isinstance(place.thing, nn.Module) and not calls:
        assert flow.requests.names is not None
        return _not_called(flow.requests.names, place)
    if site.call is not None and site.call >= calls:
        return f"it was called {calls} time{'s' if calls != 1 else ''}"
    if (note := flow.note(place, site)) is not None:
        is_weights = site.path == (1,) and "Attention" in type(place.thing).__name__
        hint = '; transformers\' attention returns its weights with attn_implementation="eager" alone'
        return note + (hint if is_weights and site.kind.endswith("output") else "")
    if not site.kind.startswith("grad"):
        return "it was called, but nothing came out of its hooks (were they cleared inside the block?)"
    if type(place.thing).__name__ == "DTensor":
        return (
            "the parameter is sharded, and FSDP writes its gradient itself; the layer's :input and :grad_output are "
            "this rank's"
        )
    if not flow.expected.backwards:
        return "no backward ran in this block; call loss.backward() inside it"
    return "no gradient reached it: it is not used in what was differentiated, or only detached"


def _not_called(names: Names, place: Place) -> str:
    above, _, own = place.name.rpartition(".")
    if is_container(place.thing):
        return f"a {type(place.thing).__name__} is a container and is never called; name the modules in it"
    if isinstance(names.modules.get(above), nn.MultiheadAttention):
        return (
            f"MultiheadAttention uses the weights of its {own} without calling it; '{above}:output[0]' is what comes "
            "out of it"
        )
    return "the module was not called in this block and thread; module.forward(x) does not count: write module(x)"
