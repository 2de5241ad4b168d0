"""Upload converted checkpoints to the Hugging Face Hub: files, license, model card."""
