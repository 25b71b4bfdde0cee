// Pools: what runs share in a period, what they spent and reserved of it, and what is left.
import { html } from "../ui.js";
import { count, duration, localTime, plural, usd } from "../format.js";
import { Empty, Loaded, PageHead, Table } from "../parts.js";
import { useQuery } from "../queries.js";

const UNITS = { usd, tokens: (amount) => `${count(amount)} tokens`, requests: (amount) => plural(amount, "call") };

export function PoolsPage() {
  const query = useQuery("pools", {}, { every: 5000 });
  return html`<${PageHead} title="Pools" note=${query.data && plural(query.data.items.length, "pool")} />
    <${Loaded} query=${query}>${({ items }) => (items.length
      ? html`<${Table} label="Pools" head=${["Pool", "Period", ...["Limit", "Spent", "Reserved", "Left"].map((each) => [each, "num"]), "Resets"]} rows=${items.map(line)} />`
      : html`<${Empty} title="No pool counts anything now.">A pool is a budget or a limit of a model that runs share. It is listed while it counts model calls.<//>`)}<//>`;
}

function line(pool) {
  // A pool counts all units, and limits some of them.
  const units = Object.keys(UNITS).filter((unit) => [pool.limits[unit], pool.spent[unit], pool.reserved[unit]].some(Boolean));
  const amounts = (name) => units.map((unit) => html`<div key=${unit}>${pool[name][unit] === undefined ? "no limit" : UNITS[unit](pool[name][unit])}</div>`);
  const isEmpty = Object.values(pool.left).some((amount) => amount <= 0);
  return [
    html`<span tabindex="0" data-row class="break">${pool.tenant ? `${pool.name} · ${pool.tenant}` : pool.name}</span>${isEmpty && html` <span class="badge is-failed">used up</span>`}`,
    typeof pool.per === "string" ? pool.per : `any ${duration(pool.per)}`,
    ...["limits", "spent", "reserved", "left"].map(amounts),
    pool.ends_at ? html`<time datetime=${pool.ends_at}>${localTime(pool.ends_at)}</time>` : html`<span class="quiet">bit by bit</span>`,
  ];
}
