"""cute_ssd under the signatures of others, and `enable()` to put it into their code.

`mamba_ssm` and `vllm` hold functions with the signatures of those packages and `enable()` for an installed one;
`transformers` holds `enable(model)`. None of the three packages needs to be installed to import these modules.
"""

from . import mamba_ssm, transformers, vllm

__all__ = ["mamba_ssm", "transformers", "vllm"]
