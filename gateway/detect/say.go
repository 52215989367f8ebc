package detect

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Commands that an operator may copy. TOKEN and ADMIN are the token and the address of the admin listener.
const (
	workers = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/workers" | jq '.engines[] | {id, role, state, since, error}'`
	logs    = "journalctl -u evenkeel --since -1h -o cat | tail -50"
	undrain = `curl -s -H "Authorization: Bearer $TOKEN" -X DELETE "$ADMIN/workers/{where}/drain"`
	drains  = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/workers" | jq .drains`
	tight   = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/status" | jq '.dispatch.models[].workers[] | select(.tight) | {name, slots, used, kv_tokens, capacity}'`
	held    = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/status" | jq '.dispatch.models[].groups[] | {name, policy, held, rounds}'`
	receipt = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/decisions?outcome=failed&n=20" | jq '.receipts[] | {id, outcome, attempts}'`
	ofKey   = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/decisions?running=1&key={key}&n=20" | ` +
		`jq '.receipts[] | {id, state, arrival, prompt_tokens}'`
	certEnd = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/metrics" | grep -E "certificate_expiry|reloads_total.*tls"`
	advised = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/status" | jq '.advice[] | {model, says, prefill, decode}'`
)

// Advice if one key has most of the requests.
const (
	askKey = "Ask who uses API key {key}, and lower its max_concurrent or rpm in the key file. Else add "
	flood  = askKey + "prefill engines."
	floods = askKey + "decode ranks."
)

// describe describes the incident as of now. If it is over, the description covers all findings it ever had.
func (o *incident) describe(now time.Time) Incident {
	members := o.members
	if !o.lasts() {
		members = o.everFound
	}
	lead := &members[0]
	k := kinds[lead.Kind]
	in := Incident{ID: o.id, Subject: o.subject, Kind: lead.Kind, State: o.state(now), Severity: Warn, Harm: o.measured, Panel: lead.Panel,
		Headline: k.headline, Where: []string{}, Clients: k.clients, Next: k.next, Runbook: k.runbook}
	in.SinceMs, in.Times, in.FirstMs = o.since.UnixMilli(), 1, o.since.UnixMilli()
	if !o.lasts() {
		in.UntilMs = o.until.UnixMilli()
	} else if at := o.lastFound(); k.rests > 0 && at.Before(now) {
		in.LastMs = at.UnixMilli()
	}
	if o.lasts() && now.Sub(o.lastBad) <= moment { // so that the severity does not change with every look
		in.Severity = Bad
	}
	host := lead.host
	names := map[string]bool{}
	groups := [][]*member{}
	var listedMembers []*member // the members named in Where
	for i := range members {
		m := &members[i]
		if m.Severity == Bad {
			in.Severity = Bad
		}
		in.Crowded = in.Crowded || kinds[m.Kind].crowded
		at := slices.IndexFunc(groups, func(g []*member) bool { return g[0].Kind == m.Kind })
		if at < 0 {
			groups = append(groups, []*member{m})
		} else {
			groups[at] = append(groups[at], m)
		}
		if m.effect {
			continue
		}
		if m.host != host {
			host = ""
		}
		in.Ranks = append(in.Ranks, m.Ranks[:min(len(m.Ranks), mostListed-len(in.Ranks))]...)
		if m.Where != "" && !names[m.Where] {
			if names[m.Where] = true; len(in.Where) < mostListed {
				in.Where, listedMembers = append(in.Where, m.Where), append(listedMembers, m)
			}
		}
	}
	in.Count = len(names)
	in.What = title(groups[0], host)
	if k.prefill != "" && !slices.ContainsFunc(groups[0], func(m *member) bool { return m.Of != "prefill engine" }) {
		in.Clients = k.prefill
	}
	if in.Count > 1 && slices.ContainsFunc(in.Where, func(name string) bool { return !strings.Contains(in.What, name) }) {
		in.Named = named(listedMembers, in.Count)
	}
	for _, g := range groups[1:] {
		if first := kinds[g[0].Kind].first; first != "" && g[0].effect && in.What != "" {
			in.Clients = "Clients whose requests ran there get an error, because no other engine is left."
			if lead.Kind == EngineHangs {
				first = "All new requests wait, and get a 503 if it lasts"
				in.Clients = "Clients whose requests ran there wait, too, and get an error if no engine comes back."
			}
			in.Headline, in.What = first, first+", because "+strings.ToLower(in.What[:1])+in.What[1:]
		}
	}
	for i, g := range groups[1:] {
		if i == 0 {
			in.Clients += " Also:"
		}
		in.Clients += " " + title(g, "") + "."
	}
	if o.lasts() && k.effect {
		in.Clients += before(o.everFound, members)
	}
	in.Command = command(k.command, lead)
	if lead.Key != "" {
		in.Next = strings.ReplaceAll(k.sender, "{key}", lead.Key)
		if plain(lead.Key) {
			in.Command = strings.ReplaceAll(ofKey, "{key}", lead.Key)
		}
	}
	return in
}

// before describes a cause that is over while its effects go on, as a sentence to add; empty: there is none. ever are all findings that the
// incident had, now those of now.
func before(ever, now []member) string {
	var causes []*member
	for i := range ever {
		m := &ever[i]
		if !kinds[m.Kind].effect && m.Kind == ever[0].Kind &&
			!slices.ContainsFunc(now, func(n member) bool { return n.subject() == m.subject() }) {
			causes = append(causes, m)
		}
	}
	if len(causes) == 0 {
		return ""
	}
	return " It began with what is over now: " + title(causes, "") + "."
}

// title describes the findings of one kind, as a sentence without a full stop. host is the host of all of them; empty: they are on several.
func title(same []*member, host string) string {
	lead := same[0]
	if k := kinds[lead.Kind]; len(same) > 1 && k.many != "" {
		reason := WithoutAddress(lead.Reason, lead.Where)
		if reason != "" && slices.ContainsFunc(same, func(m *member) bool { return m.commonReason != lead.commonReason }) {
			reason += " (at the first one)"
		}
		return k.describe(whichOf(same, host), reason) + lead.Rest
	}
	if more := len(same) - 1; more > 0 {
		return fmt.Sprintf("%s, and %d more of this kind", lead.What, more)
	}
	return lead.What + lead.Rest
}

// whichOf names the subject of several findings in words: their common host, or both names if there are two, or their number.
func whichOf(same []*member, host string) string {
	noun := nounOf(same) + "s"
	switch {
	case host != "":
		return fmt.Sprintf("%d %s on host %s", len(same), noun, host)
	case len(same) == 2 && same[0].Where != same[1].Where:
		return fmt.Sprintf("%s%s %s and %s", strings.ToUpper(noun[:1]), noun[1:], same[0].Where, same[1].Where)
	}
	return fmt.Sprintf("%d %s", len(same), noun)
}

// named lists the names of members, grouped by what they are, such as engines or ranks. all is the number of all members, some of which the
// list may lack; the text then ends with how many.
func named(members []*member, all int) string {
	var nouns []string
	by := map[string][]string{}
	for _, m := range members {
		if by[m.Of] == nil {
			nouns = append(nouns, m.Of)
		}
		by[m.Of] = append(by[m.Of], m.Where)
	}
	parts := make([]string, 0, len(nouns))
	for _, noun := range nouns {
		parts = append(parts, "the "+plural(noun, len(by[noun]))+" "+listed(by[noun]))
	}
	s := "These are " + strings.Join(parts, ", and ")
	if more := all - len(members); more > 0 {
		s += fmt.Sprintf(", and %d more", more)
	}
	return s + "."
}

// listed joins names as in a sentence.
func listed(names []string) string {
	if n := len(names) - 1; n > 0 && n < mostListed-1 {
		return strings.Join(names[:n], ", ") + " and " + names[n]
	}
	return strings.Join(names, ", ")
}

func plural(noun string, n int) string {
	if n == 1 {
		return noun
	}
	return noun + "s"
}

// nounOf returns a noun that fits all of these findings.
func nounOf(same []*member) string {
	noun := same[0].Of
	for _, m := range same {
		if m.Of != noun && strings.HasSuffix(m.Of, "engine") && strings.HasSuffix(noun, "engine") {
			noun = "engine"
		} else if m.Of != noun {
			return "area" // for example a group and a region
		}
	}
	return noun
}

// command fills in a command for an operator to copy; empty: a name in it has characters with a meaning in a shell.
func command(text string, lead *member) string {
	names := map[string]string{"{where}": lead.Where, "{engine}": engineOf(lead.Where), "{host}": strings.Trim(hostOf(lead.Where), "[]"),
		"{rank}": ""}
	if len(lead.Ranks) > 0 {
		names["{rank}"] = lead.Ranks[0]
	}
	for at, name := range names {
		if strings.Contains(text, at) && !plain(name) {
			return ""
		}
		text = strings.ReplaceAll(text, at, name)
	}
	return text
}

// describe describes several findings of a kind. which is the subject of the sentence; reason may be empty.
func (d *Detector) describe(which, reason string) string {
	s := which + " " + d.many
	if reason != "" {
		s += ": " + reason
	}
	return s
}

// Incidents lists the incidents: lasting ones first, the most harmful first, then resolved ones, the latest first. A resolved warning that
// equals an earlier one in the list is only counted there.
func (b *Book) Incidents() []Incident {
	sorted := slices.Clone(b.list)
	slices.SortStableFunc(sorted, func(x, y *incident) int {
		switch {
		case x.lasts() && !y.lasts():
			return -1
		case y.lasts() && !x.lasts():
			return 1
		case !x.lasts():
			return y.until.Compare(x.until)
		}
		return cmp.Or(cmp.Compare(y.harm(), x.harm()), cmp.Compare(len(y.members), len(x.members)), x.since.Compare(y.since))
	})
	list := make([]Incident, 0, len(sorted))
	restListed := len(b.unplaced) == 0
	equal := map[string]int{} // index in list of the first warning with these words
	for _, o := range sorted {
		if !restListed && !o.lasts() { // unplaced findings last, so they stand before resolved incidents
			list, restListed = append(list, b.rest()), true
		}
		in := o.describe(b.now)
		if b.enginesAway && o.lasts() && kinds[o.members[0].Kind].crowded { // requests may wait because engines are missing
			in.Next = "Bring back the engines that are down. " + in.Next
		}
		if in.Severity == Warn {
			text := in.Headline + "\n" + strings.Join(in.Where, "\n")
			if i, ok := equal[text]; ok && in.UntilMs > 0 { // it is over
				list[i].Times++
				list[i].FirstMs = min(list[i].FirstMs, in.SinceMs)
				continue
			} else if !ok {
				equal[text] = len(list)
			}
		}
		list = append(list, in)
	}
	if !restListed {
		list = append(list, b.rest())
	}
	return list
}

// beyondSeverity is the worst severity of the unplaced findings.
func (b *Book) beyondSeverity() string {
	if b.unplacedBad {
		return Bad
	}
	return Warn
}

// tooMuch is the kind of the incident that stands for all unplaced findings.
const tooMuch Kind = "too_much"

// rest describes the unplaced findings. Its id is 0, which no other incident has.
func (b *Book) rest() Incident {
	return Incident{
		Kind: tooMuch, State: Lasting, Severity: b.beyondSeverity(), Panel: "problems", Headline: "Too much is wrong", Where: []string{},
		SinceMs: b.unplacedSince.UnixMilli(), Times: 1, FirstMs: b.unplacedSince.UnixMilli(),
		What:    fmt.Sprintf("There are %d more findings than are told one by one", len(b.unplaced)),
		Named:   "The first ones: " + strings.Join(b.unplaced[:min(mostListed, len(b.unplaced))], ". ") + ".",
		Clients: "Clients see no more of these than of those that are told.", Next: "Look at those that are told first.",
	}
}
