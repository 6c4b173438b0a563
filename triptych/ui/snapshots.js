// Snapshots of the service, from the events of its stream: a whole one first, then what has changed since the one before.

/** The snapshot after `before`, null if there is none yet. Requests stay in the order of their arrival. */
export function next(before, { kind, ...news }) {
  if (kind === "snapshot") return news;
  const { gone = [], requests = [], instances, ...fields } = news;
  const marks = new Map(before.requests.map((mark) => [mark.key, mark]));
  for (const key of gone) marks.delete(key);
  for (const mark of requests) marks.set(mark.key, mark);
  return {
    ...before,
    ...fields,
    instances: instances?.map((one, place) => one ?? before.instances[place]) ?? before.instances,
    requests: [...marks.values()],
  };
}
