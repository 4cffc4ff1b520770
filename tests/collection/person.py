"""What a person does at the page, with real key events."""

from __future__ import annotations

from chromium import Tab


async def hold(tab: Tab, key: str, steps: int) -> None:
    """Hold a key for so many control steps of env 0, as far as they go before the take ends."""
    if steps < 1:
        return
    first = await tab.run("state.envs[0].step")
    await tab.key(key, True)
    await tab.until(f"state.envs[0].step >= {first + steps - 2} || !state.envs[0].running || state.envs[0].step < {first}")
    await tab.key(key, False)


async def first_look(tab: Tab) -> None:
    """Say who it is, and wait for the first picture."""
    await tab.until("document.querySelector('#who').open")
    await tab.run("document.querySelector('#name').value = ''")
    await tab.type("ada")
    await tab.run("document.querySelector('#who button').click()")
    await tab.until("state && state.envs[0].running && shown[0]")
