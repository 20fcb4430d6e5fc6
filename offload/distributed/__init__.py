"""Processes that train one model together: who they are, what they tell each other, how they share its parameters."""
