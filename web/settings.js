// What the reader has chosen: kept in this browser, written into the form, read into requests.

const kPlace = "dualdecoder-settings";
const kNumbers = ["max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"];
const kFields = [...kNumbers, "key", "system", "policy", "budget"];
const field = (name) => document.getElementById(name);

let values = {};
try {
  values = JSON.parse(localStorage.getItem(kPlace)) ?? {};
} catch {
  // Of another version, or no storage: as if nothing had been chosen.
}

export const key = () => values.key ?? "";
export const system = () => values.system ?? "";

/** The fields of a request. */
export function sampling() {
  const fields = {};
  for (const name of kNumbers) {
    if (values[name]) fields[name] = Number(values[name]);
  }
  const own = {};
  if (values.policy) own.policy = values.policy;
  if (values.budget) own.budget = Number(values.budget);
  if (Object.keys(own).length > 0) fields.dualdecoder = own;
  return fields;
}

export function fillPolicies(select, policies, chosen, first) {
  select.replaceChildren(...(first ? [new Option(first, "")] : []), ...policies.map((name) => new Option(name, name)));
  select.value = policies.includes(chosen) ? chosen : (first ? "" : policies[0]);
}

export function setServer(props) {
  fillPolicies(field("policy"), props.policies, values.policy, `server's: ${props.policy}`);
  field("budget").placeholder = props.budget_tokens;
}

export function begin(onChange) {
  for (const name of kFields) {
    field(name).value = values[name] ?? "";
    field(name).addEventListener("change", () => {
      if (!field(name).validity.valid) return;
      values[name] = field(name).value;
      localStorage.setItem(kPlace, JSON.stringify(values));
      onChange(name);
    });
  }
  const dialog = field("settings");
  dialog.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    dialog.close();
  });
}

export function open(name) {
  field("settings").showModal();
  if (name) field(name).focus();
}
