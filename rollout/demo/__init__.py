"""`rollout demo`: a real language model trained by asynchronous GRPO against a live server, on a laptop's CPU."""
