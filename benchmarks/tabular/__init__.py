"""The project's objectives on a policy that is a table: success, gradients and divergences are exact, hundreds of seeds take minutes."""
