"""Runs `lora_combiner`, which merges a LoRA adapter into its base model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from openrlhf.checkpoints.export import replacing, write_model
from openrlhf.config.combining import CombinerConfig
from openrlhf.config.flags import UserError
from openrlhf.config.shared import LoadingConfig
from openrlhf.models.adapters import untie_adapted
from openrlhf.models.loading import DTYPES, STEP_TOKENS, LoadSpec, load_causal_lm
from openrlhf.models.probe import find_gap, probe_logits
from openrlhf.models.scalar import load_scalar
from openrlhf.models.weights import require_finite
from openrlhf.reporting import notice, say


def combine(config: CombinerConfig) -> None:
    """Merge the weights in float32 on the CPU, round once, and write the model and its tokenizer.

    Then reload the written model and compare its logits with those of the unmerged model.

    A reward model's adapter folder also contains the head's name and the reward statistics; a
    process reward model's adapter folder also contains the model's tokens. Raises UserError for an
    adapter trained on a different model.
    """
    folder = Path(config.lora_path)
    spec = LoadSpec(
        path=config.model_path, ds=LoadingConfig(param_dtype="fp32", attn_implementation="eager")
    )
    stored: dict[str, Any] = {}
    if (folder / "config.json").exists():
        stored = AutoConfig.from_pretrained(folder).to_dict()
    if config.is_rm:
        base = load_scalar(spec, head_prefix=stored.get("value_head_prefix", "score")).hf
    else:
        base = load_causal_lm(spec)
    for name in {"mean", "std", STEP_TOKENS} & stored.keys():
        setattr(base.config, name, stored[name])
    adapted = load_adapted(config, base)
    expected = probe_logits(adapted.get_base_model())
    if untie_adapted(base):
        notice(
            f"{folder} adapts the output layer or the embeddings, which are tied in "
            f"{config.model_path}. The merged model stores them separately (tie_word_embeddings "
            "false)."
        )
    has_tokenizer = (folder / "tokenizer_config.json").exists()
    tokenizer = folder if has_tokenizer else config.model_path
    merged = adapted.merge_and_unload().to(DTYPES[config.ds.param_dtype])
    with replacing(Path(config.output_path)) as aside:
        write_model(merged, merged.state_dict(), aside)
        AutoTokenizer.from_pretrained(tokenizer).save_pretrained(aside)
        del adapted, base, merged
        written = replace(spec, path=str(aside))
        if config.is_rm:
            reloaded = load_scalar(written, require_head=True).hf
        else:
            reloaded = load_causal_lm(written)
        gap = find_gap(expected, probe_logits(reloaded), DTYPES[config.ds.param_dtype])
        if gap:
            raise UserError(
                f"--lora_path {folder} was not merged into --model_path {config.model_path}, "
                "because merging changes the logits. The logits of the merged and the unmerged "
                f"model are {gap.text}."
            )
    say(
        f"Wrote the merged model to {config.output_path} in {config.ds.param_dtype} "
        "(--ds.param_dtype)."
    )


def load_adapted(config: CombinerConfig, base: PreTrainedModel) -> Any:
    """Return the model with the unmerged adapter from --lora_path.

    Raises UserError for an adapter trained on a different model, and ModelError for non-finite
    weights.
    """
    import peft  # slow to import, so it is not imported at startup (see quick_imports)

    folder = config.lora_path
    try:
        trained_on = str(peft.PeftConfig.from_pretrained(folder).base_model_name_or_path)
        if Path(trained_on).resolve() != Path(config.model_path).resolve():
            notice(
                f"--lora_path {folder} was trained on {trained_on}, but is being merged into "
                f"{config.model_path}."
            )
        adapted = peft.PeftModel.from_pretrained(base, folder)
        stored = peft.load_peft_weights(folder).keys()
        unmatched = stored ^ peft.get_peft_model_state_dict(adapted).keys()
        if unmatched:
            shown = ", ".join(sorted(unmatched)[:3])
            raise ValueError(
                f"{len(unmatched)} weights exist only in the adapter or only in the model: {shown}"
            )
    except (AttributeError, OSError, RuntimeError, ValueError) as error:
        raise UserError(
            f"--lora_path {folder} is not an adapter of --model_path {config.model_path}: {error}"
        ) from error
    require_finite(adapted, folder)
    return adapted
