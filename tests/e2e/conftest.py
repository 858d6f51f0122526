"""Option of the kill -9 test."""


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--kills", type=int, default=3, help="random instants at which test_kill.py kills a run (20 to be thorough)"
    )
