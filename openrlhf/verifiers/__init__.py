"""Built-in verifiable rewards: mathematics, form, length, and code in a sandbox. They run in hosts."""
