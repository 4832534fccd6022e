"""What a run did: its records in one form, and a report of it."""
