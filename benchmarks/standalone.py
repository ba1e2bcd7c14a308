"""Import the operations on a machine that has torch and triton and nothing else.

``kvpress_prob`` as a whole needs kvpress and transformers, and its signatures need jaxtyping. The operations need none
of them to run: where one is missing, a package without contents and annotations without meaning take their place, for
this process only. Import this module before ``kvpress_prob``.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


class _Shape:
    def __class_getitem__(cls, item: object) -> type:
        return object


def _stand_in() -> None:
    if importlib.util.find_spec("jaxtyping") is None:
        jaxtyping = ModuleType("jaxtyping")
        for name in ("Bool", "Float", "Float32", "Int", "Int64"):
            setattr(jaxtyping, name, _Shape)
        sys.modules["jaxtyping"] = jaxtyping
    if any(importlib.util.find_spec(name) is None for name in ("kvpress", "transformers")):
        package = ModuleType("kvpress_prob")
        package.__path__ = [str(Path(__file__).parents[1] / "kvpress_prob")]
        sys.modules["kvpress_prob"] = package


_stand_in()
