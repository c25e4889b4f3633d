"""The command line: `tilewise demo` and its sisters."""
