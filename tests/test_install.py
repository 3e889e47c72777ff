"""The set-up passes pip's settings to uv."""

from tests.install import read_settings


def test_settings_of_pip_reach_uv():
    listed = """:env:.timeout='60'
:env:.cert='/etc/one.pem'
global.index-url='https://mirror.example/simple'
global.extra-index-url='https://one.example/simple https://two.example/simple'
install.find-links='\\n/wheels\\n/more'
"""
    assert read_settings(listed) == {
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/etc/one.pem",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }
    assert read_settings("") == {"UV_INDEX_STRATEGY": "unsafe-best-match"}
