"""What a store must survive, done to it on purpose: cuts, kills, flips, power cuts, crowds.

`recorded_files` and `disk_model` say which states a crash may leave; `scenarios` what is being
interrupted; `promises` what must hold afterwards.  tools/crash and tools/soak are the programs.
"""
