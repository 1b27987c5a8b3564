"""One file per pattern. Nothing here imports the app, so every file can be copied into another project."""
