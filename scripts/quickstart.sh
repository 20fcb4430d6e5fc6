#!/usr/bin/env bash
# From a clean clone to a trained model: makes the environment, fine-tunes a small Llama on this machine (under a
# minute on two cores, nothing is downloaded but packages), and asks the result a question. Arguments are overrides:
#
#   bash scripts/quickstart.sh
#   bash scripts/quickstart.sh max_steps_per_epoch=20 optimizer.lr=1e-4
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
cd "$ROOT"

output=outputs/quickstart
for argument in "$@"; do
    case $argument in
    output_dir=*) output=${argument#output_dir=} ;;
    esac
done

say "tune run full_finetune_single_device --config tiny_llama_offload output_dir=$output $*"
tune run full_finetune_single_device --config tiny_llama_offload output_dir="$output" "$@"

question="What does shutil.copytree do?"
say "tune run generate --config tiny_llama_generate checkpointer.checkpoint_dir=$output prompt.user=\"$question\""
tune run generate --config tiny_llama_generate checkpointer.checkpoint_dir="$output" prompt.user="$question"

cat <<END

The model is in $output/step_* (Hugging Face format), what happened in $output/metrics.jsonl.

Next (after: source ${VENV#"$ROOT"/}/bin/activate):
  tune run generate --config tiny_llama_generate checkpointer.checkpoint_dir=$output prompt.user="What does os.path.join do?"
  tune run full_finetune_single_device --config tiny_llama_offload optimizer=torch.optim.AdamW output_dir=outputs/plain
  tune run lora_finetune_single_device --config tiny_llama_lora
  tune ls                                     every recipe and config
  tune cp llama2_7b_offload ./mine.yaml       a config of your own; its first lines say how to get the weights
  tune run full_finetune_single_device --config llama2_7b_offload optimizer.lr=1e-5
END
