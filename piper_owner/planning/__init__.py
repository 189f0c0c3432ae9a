"""What a model costs on a layout of devices: memory, messages and seconds, before anything runs. Pure."""
