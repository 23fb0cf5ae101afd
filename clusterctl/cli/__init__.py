"""The command line: parse options, call the library, show the results; one file per noun."""
