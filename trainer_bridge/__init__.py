"""The trainer's half of `rollout`: post prompts, push weights, use what comes back."""
