"""The subcommands of `dspark`, one file each: add_parser(subparsers) and run(args)."""
