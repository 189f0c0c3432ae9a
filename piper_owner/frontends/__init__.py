"""Other libraries' pipelines and models, as stages that piper-owner can train."""
