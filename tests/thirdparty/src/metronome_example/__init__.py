"""An example of a plug-in package: a policy loss ``reinforce`` and a group controller ``alternating``."""
