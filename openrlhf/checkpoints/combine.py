"""`lora_combiner`: the plain model that an adapter and its base are."""

from pathlib import Path

from peft import PeftModel, get_peft_model_state_dict, load_peft_weights
from transformers import AutoConfig, AutoTokenizer

from openrlhf.config.combining import CombinerConfig
from openrlhf.config.flags import UserError
from openrlhf.models.loading import DTYPES, LoadSpec, load_causal_lm
from openrlhf.models.scalar import load_scalar


def combine(config: CombinerConfig) -> None:
    """Write the merged model and its tokenizer: merged in float32, in CPU memory, and rounded once.

    A reward model keeps the configuration of the adapter's folder, which has the statistics of its rewards.
    """
    folder = Path(config.lora_path).expanduser()
    spec = LoadSpec(path=config.model_path, param_dtype="fp32", attention="eager", packing=False)
    stored = AutoConfig.from_pretrained(folder) if (folder / "config.json").exists() else None
    if config.is_rm:
        trained = stored.to_dict() if stored else {}
        base = load_scalar(spec, head_prefix=trained.get("value_head_prefix", "score")).hf
        base.config.update({name: trained[name] for name in ("mean", "std") if name in trained})
    else:
        base = load_causal_lm(spec)
    try:
        adapted = PeftModel.from_pretrained(base, folder)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"--lora_path {folder} is no adapter of --model_path {config.model_path}: {error}") from error
    if other := load_peft_weights(str(folder)).keys() ^ get_peft_model_state_dict(adapted).keys():
        raise UserError(
            f"--lora_path {folder} is no adapter of --model_path {config.model_path}: only one of them has "
            f"{', '.join(sorted(other)[:3])} ({len(other)} in all)."
        )
    adapted.merge_and_unload().to(DTYPES[config.ds.param_dtype]).save_pretrained(config.output_path)
    has_tokenizer = (folder / "tokenizer_config.json").exists()
    AutoTokenizer.from_pretrained(folder if has_tokenizer else config.model_path).save_pretrained(config.output_path)
    print(f"{config.output_path}: {config.model_path} with {folder} merged, in {config.ds.param_dtype}")
