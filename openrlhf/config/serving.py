"""Configuration of `serve_rm`, the HTTP server of a reward model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from openrlhf.config import shared
from openrlhf.config.commands import ModelCommand
from openrlhf.config.flags import Section, count, option, required, switch, unset


class ServedModelConfig(Section):
    """The reward model."""

    model_name_or_path: str = required(
        "Folder or Hub name of a reward model, with its tokenizer.", holds="model"
    )
    normalize_enable: bool = switch(
        "Normalize rewards with the stored mean and standard deviation."
    )


class ServedLoadingConfig(shared.ScalarHeadConfig, shared.LoadingConfig):
    """Loading of the reward model."""


class ServeConfig(ModelCommand):
    """HTTP server of a reward model."""

    reward: ServedModelConfig = ServedModelConfig()
    ds: ServedLoadingConfig = ServedLoadingConfig()
    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0: all addresses of this machine.")
    port: int = option(5000, "TCP port; 0: any free port.", ge=0, le=65535)
    truncation_side: str = option(
        "left",
        "Side on which texts longer than data.max_len are truncated; the eos token is kept.",
        choices=("left", "right"),
    )
    batch_size: int | None = unset(
        "Maximum texts in a forward pass; unset: limited only by max_batch_tokens.", ge=1
    )
    max_batch_tokens: int = count(
        16192,
        "Maximum tokens in a forward pass, including padding; unset: at least data.max_len.",
    )
    max_batch_wait: float = option(
        0.005,
        "Maximum seconds that an idle model waits for as many requests as in its last batch.",
        ge=0,
    )
    max_request_texts: int = count(1024, "Maximum texts in a request.")
    max_request_mib: float = option(16.0, "Maximum size of a request in MiB.", gt=0)

    def derived_values(self) -> dict[str, Any]:
        """Return the token limit of a forward pass, raised to fit the longest text."""
        longest = max(self.max_batch_tokens, self.data.max_len)
        return self.unless_given({"max_batch_tokens": longest})

    def notices(self) -> Iterator[str]:
        """Yield notices, including those about who can reach the server."""
        if self.host in ("127.0.0.1", "localhost", "::1"):
            yield (
                "<host>: only programs on this machine can connect. For trainers on other nodes, "
                "use --host 0.0.0.0."
            )
        else:
            yield (
                "<host>: anyone who can reach this address can use the server, which has no "
                "authentication."
            )
        yield from super().notices()

    def violations(self) -> Iterator[str]:
        """Yield a sentence for each mistake in this resolved configuration."""
        yield from super().violations()
        if self.max_batch_tokens < self.data.max_len:
            yield (
                "<max_batch_tokens> is too small for a text of <data.max_len>: raise it or leave "
                "it out."
            )
