"""The interfaces of other attention libraries, with their own meaning, on Tilewise.

Each module is imported on its own: `flash_attn2`, `flash_attn3`, `flash_attn4`, `bert_padding`, `rotary`, `sdpa`,
`flex`, `transformers`. `install("flash_attn")` lets `import flash_attn` find them; nothing is replaced unasked.
"""

from tilewise.compat.install import Installation, install, uninstall

__all__ = ["Installation", "install", "uninstall"]
