"""The demo pair's data: prompts, and the drafter trained for SmolLM2-135M-Instruct."""
