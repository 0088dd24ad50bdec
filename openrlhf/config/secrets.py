"""The former place of `openrlhf.masking`."""

from openrlhf.masking import hide as hide
from openrlhf.masking import is_hidden as is_hidden
from openrlhf.masking import without_secrets as without_secrets
