"""metronome in OpenRLHF: ``python -m metronome_openrlhf <train_ppo_ray's flags> --metronome.KEY VALUE``."""
