"""The command line: what can be asked for (help_page), which keys there are (schema_keys, config_reference), how a config is put together of what
is given (composing) and what is answered to a mistake in it (mistakes, config_files, effect), and starting what was asked for (starting)."""
