"""verl reads its platform when it is imported first."""

import os

os.environ.setdefault("VERL_PLATFORM", "cpu")
