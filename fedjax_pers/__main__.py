from fedjax_pers.cli import main

main()
