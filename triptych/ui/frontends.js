// Says which of several frontends the page shows, and leads to the others.

import { byId, h, show } from "./dom.js";

let shown = null;
let number = 1;

/** Whether the service has several frontends. */
export const areSeveral = () => number > 1;

/** `service` is that of a snapshot. */
export function showFrontends({ num_frontends, frontend, frontend_ports }) {
  const news = JSON.stringify([num_frontends, frontend, frontend_ports]);
  if (news === shown) return;
  shown = news;
  number = num_frontends;
  const place = byId("frontends");
  show(place, num_frontends > 1);
  const here = Number(location.port) || (location.protocol === "https:" ? 443 : 80);
  const alone = frontend_ports[frontend] === here;
  const others = Object.entries(frontend_ports).filter(([name]) => !alone || name !== frontend);
  const links = others.flatMap(([name, port]) => [" ", h("a", { href: `${location.protocol}//${location.hostname}:${port}/ui`, text: name })]);
  const lead = links.length ? (alone ? " Others:" : " One alone:") : "";
  place.replaceChildren(sentence(num_frontends, frontend, alone, links.length > 0) + lead, ...links);
}

function sentence(count, name, alone, isShared) {
  if (alone) return `This page shows ${name}, one of ${count} frontends.`;
  if (!isShared) return `This page shows the frontend at ${name}, one of ${count}.`;
  return `${count} frontends answer at this address. Pipeline shows ${name}; what else you see here may be another's.`;
}
