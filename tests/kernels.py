"""Where kernel tests run. Import before any module with Triton kernels: without a GPU they are interpreted."""

import os

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        from triton.runtime import interpreter
    except ImportError:  # then the tests skip themselves
        pass
    else:
        patch_tensor = interpreter._patch_lang_tensor

        def patch_with_index(tensor, scope) -> None:
            """Triton 3.6 makes loop bounds of arrays with one element by int(), which NumPy 2.4 refuses."""
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        interpreter._patch_lang_tensor = patch_with_index


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, which has no bfloat16 constants and is slow."""
    return DEVICE.type == "cpu"
