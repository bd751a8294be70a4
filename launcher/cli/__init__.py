"""The command line: what can be asked for (page), which keys there are (keys, reference), how a config is put together of what is given (composing)
and what is answered to a mistake in it (mistakes, files, effect), and starting what was asked for (starting)."""
