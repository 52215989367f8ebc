package detect

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Commands that an operator may copy. TOKEN and ADMIN are the token and the address of the admin
// listener.
const (
	showPairs          = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/status" | jq '.dispatch.models[].pairs'`
	showWorkers        = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/workers" | jq '.engines[] | {id, role, state, since, error}'`
	showLogs           = "journalctl -u evenkeel --since -1h -o cat | tail -50"
	takeDrainBack      = `curl -s -H "Authorization: Bearer $TOKEN" -X DELETE "$ADMIN/workers/{where}/drain"`
	showDrains         = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/workers" | jq .drains`
	showTightRanks     = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/status" | jq '.dispatch.models[].workers[] | select(.tight) | {name, slots, used, kv_tokens, capacity}'`
	showHeldRequests   = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/status" | jq '.dispatch.models[].groups[] | {name, policy, held, rounds}'`
	showFailedReceipts = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/decisions?outcome=failed&n=20" | jq '.receipts[] | {id, outcome, attempts}'`
	showRequestsOfKey  = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/decisions?running=1&key={key}&n=20" | ` +
		`jq '.receipts[] | {id, state, arrival, prompt_tokens}'`
	showCertificates = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/metrics" | grep -E "certificate_expiry|reloads_total.*tls"`
	showAdvice       = `curl -s -H "Authorization: Bearer $TOKEN" "$ADMIN/status" | jq '.advice[] | {model, says, prefill, decode}'`
)

const (
	limitKeyOrAdd        = "Ask who uses API key {key}, and lower its max_concurrent or rpm in the key file. Else add "
	limitKeyOrAddPrefill = limitKeyOrAdd + "prefill engines."
	limitKeyOrAddDecode  = limitKeyOrAdd + "decode ranks."
)

// describe returns the incident as it is shown, an ended one with all findings that it ever had.
// Findings of the first kind are the main cause, which gives headline, What and Clients. If no
// engine is left for new requests as an effect, this becomes the headline.
func (o *incident) describe(now time.Time) Incident {
	members := o.members
	if o.isOpen() {
		members = o.present()
	}
	lead := members[0]
	k := kinds[lead.Kind]
	in := Incident{ID: o.id, Subject: lead.Where, Kind: lead.Kind, State: o.state(now), Severity: Warn, Harm: o.harmText,
		Panel: lead.Panel, Headline: k.headline, Where: []string{}, Next: k.next, Runbook: k.runbook}
	in.setTimes(o, lead, now)
	groups := byKind(members)
	mainCause, otherKinds := groups[0], groups[1:] // causes come first
	listedMembers, host := in.addMembers(members)
	for _, m := range members {
		if m.isBad(now) || !o.isOpen() && !m.badAt.IsZero() {
			in.Severity = Bad
		}
		in.Crowded = in.Crowded || kinds[m.Kind].manyWait
	}
	in.What, in.Clients = describeFindings(mainCause, host), k.clientsText(mainCause)
	lacksName := func(name string) bool { return !strings.Contains(in.What, name) }
	if in.Count > 1 && slices.ContainsFunc(in.Where, lacksName) { // in.What lacks some names
		in.Named = namesByKind(listedMembers, in.Count)
	}
	if in.Count > 1 {
		in.Named = strings.TrimSpace(in.Named + groupsOf(listedMembers))
	}
	if lead.comesAndGoes() {
		in.What += fmt.Sprintf(", and this comes and goes: it came %d times", lead.times)
		if k.getsNoRequests {
			in.Next = comesAndGoes + in.Next
		}
	}
	in.promoteNotReady(otherKinds) // before anything is added to Clients, which it may replace
	in.addToClients(otherKinds)
	if o.isOpen() && k.effect { // even the first member is an effect, so the cause is over
		in.Clients += endedCauseText(o.members[len(members):])
	}
	in.setCommand(lead, listedMembers)
	return in
}

// clientsText: no answers run on prefill engines, so some kinds have another text for them.
func (d *Detector) clientsText(mainCause []*member) string {
	aboutOthers := slices.ContainsFunc(mainCause, func(m *member) bool { return m.WhereKind != "prefill engine" })
	if d.clientsOfPrefill != "" && !aboutOthers {
		return d.clientsOfPrefill
	}
	return d.clients
}

// setTimes: equal warnings that ended earlier are added later (Times, FirstMs).
func (in *Incident) setTimes(o *incident, lead *member, now time.Time) {
	in.SinceMs = o.since.UnixMilli()
	in.Times, in.FirstMs = lead.times, in.SinceMs
	if !o.isOpen() {
		in.UntilMs = o.until.UnixMilli()
	} else if at := o.lastFound(); at.Before(now) {
		in.LastMs = at.UnixMilli()
	}
}

// setCommand: if one API key causes most of the problem, advice and command are about it.
func (in *Incident) setCommand(lead *member, listed []*member) {
	k := kinds[lead.Kind]
	in.Command = forEachEngine(k.command, listed)
	if in.Command == "" {
		in.Command = fillCommand(k.command, lead)
	}
	if lead.Key != "" {
		in.Next = strings.ReplaceAll(k.nextForKey, "{key}", lead.Key)
		if isShellSafe(lead.Key) {
			in.Command = strings.ReplaceAll(showRequestsOfKey, "{key}", lead.Key)
		}
	}
}

// addMembers adds the places of the causes. It returns the causes that Where names, and the host
// that all causes share, if any.
func (in *Incident) addMembers(members []*member) (listed []*member, host string) {
	host = members[0].host // the first member always counts as a cause
	names := map[string]bool{}
	for _, m := range members {
		if m.effect {
			continue
		}
		if m.host != host {
			host = ""
		}
		ranksLeft := maxNames - len(in.Ranks)
		in.Ranks = append(in.Ranks, m.Ranks[:min(len(m.Ranks), ranksLeft)]...)
		if m.Where != "" && !names[m.Where] {
			names[m.Where] = true
			if len(in.Where) < maxNames {
				in.Where, listed = append(in.Where, m.Where), append(listed, m)
			}
		}
	}
	in.Count = len(names)
	return listed, host
}

const comesAndGoes = "It comes back by itself and goes again, and each time it takes requests with it: " +
	"drain it until it is known why. "

// promoteNotReady makes an effect NotReady the headline, because it matters more than the cause: no
// engine is left for new requests. It is the only kind with headlineAsEffect.
func (in *Incident) promoteNotReady(otherKinds [][]*member) {
	for _, g := range otherKinds {
		headline := kinds[g[0].Kind].headlineAsEffect
		if headline == "" || !g[0].effect || in.What == "" { // in.What[:1] below needs a letter
			continue
		}
		in.Clients = "Clients whose requests ran there get an error, because no other engine is left."
		if in.Kind == EngineHangs { // its requests are not lost yet: they wait until it goes on
			headline = "All new requests wait, and get a 503 if it lasts"
			in.Clients = "Clients whose requests ran there wait, too, and get an error if no engine comes back."
		}
		in.Headline, in.What = headline, headline+", because "+strings.ToLower(in.What[:1])+in.What[1:]
	}
}

func (in *Incident) addToClients(otherKinds [][]*member) {
	also, follow := "", ""
	for _, g := range otherKinds {
		if g[0].follows {
			follow += " " + describeFindings(g, "") + "."
		} else {
			also += " " + describeFindings(g, "") + "."
		}
	}
	if also != "" {
		in.Clients += " Also:" + also
	}
	if follow != "" {
		in.Clients += " These follow from it:" + follow
	}
}

// byKind keeps the order in which the kinds first occur.
func byKind(members []*member) (groups [][]*member) {
	for _, m := range members {
		index := slices.IndexFunc(groups, func(g []*member) bool { return g[0].Kind == m.Kind })
		if index < 0 {
			groups = append(groups, []*member{m})
		} else {
			groups[index] = append(groups[index], m)
		}
	}
	return groups
}

// endedCauseText tells of a cause that is over while its effects go on. over has the findings that
// are over, causes first.
func endedCauseText(over []*member) string {
	if len(over) == 0 || over[0].isEffect() {
		return ""
	}
	return " It began with what is over now: " + describeFindings(byKind(over)[0], "") + "."
}

// describeFindings describes findings of one kind in a sentence without a full stop, with the first
// of several reasons. Reasons are compared without hosts and numbers, which differ between engines.
func describeFindings(same []*member, host string) string {
	lead := same[0]
	if k := kinds[lead.Kind]; len(same) > 1 && k.pluralText != "" {
		reason := WithoutAddress(lead.Reason, lead.Where)
		if reason != "" && slices.ContainsFunc(same, func(m *member) bool { return m.commonReason != lead.commonReason }) {
			reason += " (at the first one)"
		}
		if reason != "" {
			reason = ": " + reason
		}
		return whichOf(same, host) + " " + k.pluralText + reason + lead.Suffix
	}
	if more := len(same) - 1; more > 0 { // no words for several; no such kind sets a Suffix
		return fmt.Sprintf("%s, and %d more of this kind", lead.What, more)
	}
	return lead.What + lead.Suffix
}

// whichOf names the host if they share one, else both names if there are two, else only their
// number.
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

// namesByKind groups names by their noun, such as engine or rank. all is the number of all names.
func namesByKind(members []*member, all int) string {
	var nouns []string // in the order of their first use
	namesOf := map[string][]string{}
	for _, m := range members {
		if namesOf[m.WhereKind] == nil {
			nouns = append(nouns, m.WhereKind)
		}
		namesOf[m.WhereKind] = append(namesOf[m.WhereKind], m.Where)
	}
	parts := make([]string, 0, len(nouns))
	for _, noun := range nouns {
		parts = append(parts, "the "+plural(noun, len(namesOf[noun]))+" "+joinNames(namesOf[noun]))
	}
	sentence := "These are " + strings.Join(parts, ", and ")
	if more := all - len(members); more > 0 {
		sentence += fmt.Sprintf(", and %d more", more)
	}
	return sentence + "."
}

func groupsOf(members []*member) string {
	var groups []string
	for _, m := range members {
		if m.Group != "" && !slices.Contains(groups, m.Group) {
			groups = append(groups, m.Group)
		}
	}
	if len(groups) == 0 {
		return ""
	}
	slices.Sort(groups)
	return " They are of the " + plural("group", len(groups)) + " " + joinNames(groups) + "."
}

// joinNames puts "and" before the last name, unless more names may be left out.
func joinNames(names []string) string {
	lastName := len(names) - 1
	mayBeCutOff := len(names) >= maxNames
	if lastName > 0 && !mayBeCutOff {
		return strings.Join(names[:lastName], ", ") + " and " + names[lastName]
	}
	return strings.Join(names, ", ")
}

func plural(noun string, n int) string {
	if n == 1 {
		return noun
	}
	return noun + "s"
}

// nounOf: prefill engines and decode engines together are engines.
func nounOf(same []*member) string {
	noun := same[0].WhereKind
	for _, m := range same {
		bothAreEngines := strings.HasSuffix(m.WhereKind, "engine") && strings.HasSuffix(noun, "engine")
		switch {
		case m.WhereKind == noun:
		case bothAreEngines:
			noun = "engine"
		default: // a group and a region together
			return "area"
		}
	}
	return noun
}

// forEachEngine returns a command that asks each engine; empty: there is only one, the command asks
// none, or a name means something to a shell.
func forEachEngine(text string, members []*member) string {
	var engines []string
	for _, m := range members {
		if engine := engineOf(m.Where); isShellSafe(engine) && !slices.Contains(engines, engine) {
			engines = append(engines, engine)
		}
	}
	if len(engines) < 2 || !strings.Contains(text, "{engine}") {
		return ""
	}
	return "for e in " + strings.Join(engines, " ") + "; do " + strings.ReplaceAll(text, "{engine}", "$e") + "; done"
}

// fillCommand is empty if a name is missing, or means something to a shell.
func fillCommand(text string, lead *member) string {
	rank := ""
	if len(lead.Ranks) > 0 {
		rank = lead.Ranks[0]
	}
	names := map[string]string{
		"{where}": lead.Where, "{engine}": engineOf(lead.Where), "{host}": strings.Trim(hostOf(lead.Where), "[]"), "{rank}": rank,
	}
	for placeholder, name := range names {
		if strings.Contains(text, placeholder) && !isShellSafe(name) { // an empty name is not safe either
			return ""
		}
		text = strings.ReplaceAll(text, placeholder, name)
	}
	return text
}

// Incidents lists the open incidents, the most harmful first, then one for all unplaced findings,
// then the ended ones, the latest first. An ended warning that equals a listed one only counts in
// its Times.
func (b *Book) Incidents() []Incident {
	sorted := slices.Clone(b.list)
	slices.SortStableFunc(sorted, compareForList)
	list := incidentList{all: make([]Incident, 0, len(sorted)+1), warnings: map[string]int{}}
	toldUnplaced := len(b.unplaced) == 0
	for _, o := range sorted {
		if !o.isOpen() && !toldUnplaced { // after the open ones
			list.all, toldUnplaced = append(list.all, b.summarizeUnplaced()), true
		}
		in := o.describe(b.now)
		// the missing engines may be the reason
		if o.isOpen() && b.enginesAway && kinds[in.Kind].manyWait {
			in.Next = "Bring back the engines that are down. " + in.Next
		}
		list.add(in)
	}
	if !toldUnplaced {
		list.all = append(list.all, b.summarizeUnplaced())
	}
	return list.all
}

type incidentList struct {
	all      []Incident
	warnings map[string]int // by text: index in all of the first warning with it
}

func (l *incidentList) add(in Incident) {
	if in.Severity == Warn {
		text := in.Headline + "\n" + strings.Join(in.Where, "\n")
		i, isListed := l.warnings[text]
		if isListed && in.UntilMs > 0 {
			l.all[i].Times++
			l.all[i].FirstMs = min(l.all[i].FirstMs, in.SinceMs)
			return
		}
		if !isListed {
			l.warnings[text] = len(l.all)
		}
	}
	l.all = append(l.all, in)
}

// compareForList: open incidents come first; of these that of a busy proxy, which makes others
// doubtful, then the most harmful, then those with more findings, then the older; of the ended ones
// the latest.
func compareForList(x, y *incident) int {
	switch {
	case x.isOpen() && !y.isOpen():
		return -1
	case y.isOpen() && !x.isOpen():
		return 1
	case !x.isOpen():
		return y.until.Compare(x.until)
	}
	return cmp.Or(firstIf(x.members[0].Kind == ProxyBusy, y.members[0].Kind == ProxyBusy),
		cmp.Compare(y.harm(), x.harm()), cmp.Compare(len(y.present()), len(x.present())), x.since.Compare(y.since))
}

const tooMuch Kind = "too_much"

// summarizeUnplaced: the list was full of incidents that harm as much. Its id is 0, which no other
// incident has.
func (b *Book) summarizeUnplaced() Incident {
	severity := Warn
	if b.unplacedHaveBad {
		severity = Bad
	}
	return Incident{
		Kind: tooMuch, State: Lasting, Severity: severity, Panel: "problems", Headline: "Too much is wrong", Where: []string{},
		SinceMs: b.unplacedSince.UnixMilli(), Times: 1, FirstMs: b.unplacedSince.UnixMilli(),
		What:    fmt.Sprintf("There are %d more findings than are told one by one", len(b.unplaced)),
		Named:   "The first ones: " + strings.Join(b.unplaced[:min(maxNames, len(b.unplaced))], ". ") + ".",
		Clients: "Clients see no more of these than of those that are told.", Next: "Look at those that are told first.",
	}
}
