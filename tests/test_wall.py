"""The check that only `unsum/seams` touches torch's insides: it passes, and it turns red."""

import pytest

from wall import HOME, breaches


def test_only_the_seams_touch_torchs_insides():
    assert breaches(HOME) == []


@pytest.mark.parametrize(
    "line",
    [
        "node._input_metadata",
        "node._saved_self",
        'getattr(node, "_saved_self")',
        "tensor._version",
        "torch._C._get_tracing_state()",
        "from torch._ops import OpOverload",
        'sys.modules["torch._inductor.config"]',
        "from torch.utils import _pytree",
        "module._forward_hooks[0]",
    ],
)
def test_a_breach_is_named(tmp_path, line):
    (tmp_path / "seams").mkdir()
    (tmp_path / "seams" / "nodes.py").write_text(f"{line}\n")
    assert breaches(tmp_path) == []
    (tmp_path / "other.py").write_text(f"class Own:\n    _mine = 1\n\nOwn()._mine\n{line}\n")
    (found,) = [each for each in breaches(tmp_path) if "_autograd" not in each][:1]
    assert found.startswith("other.py:5: ")
