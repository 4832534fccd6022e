"""Contract tests: functions that a third party calls on its own plug-in's objects."""
