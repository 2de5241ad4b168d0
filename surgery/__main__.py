from surgery.cli.main import main

main()
