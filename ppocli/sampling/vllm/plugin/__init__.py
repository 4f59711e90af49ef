"""What vLLM itself loads, in an environment without ppocli: this folder is on its path."""
