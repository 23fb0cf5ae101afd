"""What a controller and `stop` do: functions of a state, an event and the time, without clocks, files and threads."""
