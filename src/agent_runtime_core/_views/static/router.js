// Pages are addressed by the fragment: #/runs?state=failed. The filters of a list are in the URL, so it can be shared.
import { useEffect, useMemo, useState } from "./ui.js";
import { withQuery } from "./source.js";

/** Return { path: ["runs", id, "events"], params: URLSearchParams } of the current URL. */
function currentRoute() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decoded);
  return { path: parts.length ? parts : ["runs"], params: new URLSearchParams(query || "") };
}

function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text; // a "%" that a person typed
  }
}

/** Return the link to a page: href(["runs", id], { after: 3 }). */
export function href(path, params) {
  return `#/${withQuery(path.map(encodeURIComponent).join("/"), params)}`;
}

export function go(path, params, { replace = false } = {}) {
  const link = href(path, params);
  if (replace) {
    history.replaceState(null, "", link);
    dispatchEvent(new HashChangeEvent("hashchange"));
  } else {
    location.hash = link;
  }
}

export function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    changed(); // it may have changed since the first rendering
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return useMemo(currentRoute, [hash]);
}
