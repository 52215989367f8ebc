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

// Advice for the case that one API key sends most of the requests.
const (
	limitKeyOrAdd        = "Ask who uses API key {key}, and lower its max_concurrent or rpm in the key file. Else add "
	limitKeyOrAddPrefill = limitKeyOrAdd + "prefill engines."
	limitKeyOrAddDecode  = limitKeyOrAdd + "decode ranks."
)

// describe returns the incident in the form in which it is shown. An ended incident is described by all findings that it ever had.
//
// The findings of the first kind are the main cause. They give the headline, the sentence (What), and what clients notice (Clients). In
// Clients, sentences on the findings of other kinds follow. If no engine is left for new requests as an effect of the cause, this becomes
// the headline and stands before the cause in What. It also replaces what clients notice of the cause.
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
	if in.Count > 1 && slices.ContainsFunc(in.Where, lacksName) { // in.What lacks some names, so all are listed in Named
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
	in.promoteNotReady(otherKinds) // before anything is added to Clients, because it may replace Clients
	in.addToClients(otherKinds)
	if o.isOpen() && k.effect { // even the first member is an effect, so a cause that the incident had is over
		in.Clients += endedCauseText(o.members[len(members):])
	}
	in.setCommand(lead, listedMembers)
	return in
}

// clientsText returns what clients notice of the main cause, which is of this kind. Some kinds have another text for the case that all
// findings are about prefill engines, because no answers run there.
func (d *Detector) clientsText(mainCause []*member) string {
	aboutOthers := slices.ContainsFunc(mainCause, func(m *member) bool { return m.WhereKind != "prefill engine" })
	if d.clientsOfPrefill != "" && !aboutOthers {
		return d.clientsOfPrefill
	}
	return d.clients
}

// setTimes sets when the incident o began and ended and, if it comes and goes, when it was found last. It counts how often its lead came.
// Equal warnings that ended earlier are added later: each raises Times, and moves FirstMs, the begin of the first occurrence, back.
func (in *Incident) setTimes(o *incident, lead *member, now time.Time) {
	in.SinceMs = o.since.UnixMilli()
	in.Times, in.FirstMs = lead.times, in.SinceMs
	if !o.isOpen() {
		in.UntilMs = o.until.UnixMilli()
	} else if at := o.lastFound(); at.Before(now) {
		in.LastMs = at.UnixMilli()
	}
}

// setCommand sets the command for the cause. If one API key causes most of the problem, the advice and the command are those for this key.
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

// addMembers adds where the causes among the members are. It sets Count to the number of these places, and lists the first maxNames of
// their names in Where, and of their ranks in Ranks. It returns the causes that Where names, and the host that all causes share; empty:
// they share none.
func (in *Incident) addMembers(members []*member) (listed []*member, host string) {
	host = members[0].host // the first member always counts as a cause
	names := map[string]bool{}
	for _, m := range members {
		if m.effect { // Where, Ranks and Count are about causes
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

// promoteNotReady makes an effect of the kind NotReady the headline, because it matters more than the cause: no engine is left that could
// serve new requests. NotReady is the only kind with headlineAsEffect. otherKinds has the findings of each kind but that of the cause.
func (in *Incident) promoteNotReady(otherKinds [][]*member) {
	for _, g := range otherKinds {
		headline := kinds[g[0].Kind].headlineAsEffect
		if headline == "" || !g[0].effect || in.What == "" { // in.What[:1] below needs a letter
			continue
		}
		in.Clients = "Clients whose requests ran there get an error, because no other engine is left."
		if in.Kind == EngineHangs { // the engine's requests are not lost yet: they wait until the engine goes on
			headline = "All new requests wait, and get a 503 if it lasts"
			in.Clients = "Clients whose requests ran there wait, too, and get an error if no engine comes back."
		}
		in.Headline, in.What = headline, headline+", because "+strings.ToLower(in.What[:1])+in.What[1:]
	}
}

// addToClients adds a sentence on the findings of each other kind to what clients notice.
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

// byKind groups the members by kind, in the order in which the kinds first occur.
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

// endedCauseText returns a sentence about a cause that is over while its effects go on; empty: there is no such cause. over has the findings
// that the incident had and does not have now, causes first.
func endedCauseText(over []*member) string {
	if len(over) == 0 || over[0].isEffect() {
		return ""
	}
	return " It began with what is over now: " + describeFindings(byKind(over)[0], "") + "."
}

// describeFindings describes findings of one kind in a sentence without a full stop. If they have several reasons, only the first one is
// shown, to keep it short. Reasons are compared in the form commonReason, without hosts and numbers, because these differ between engines.
// The text after the sentence (Suffix) is that of the first finding. host is the host that all of them share; empty: they share none.
func describeFindings(same []*member, host string) string {
	lead := same[0]
	if k := kinds[lead.Kind]; len(same) > 1 && k.pluralText != "" {
		reason := WithoutAddress(lead.Reason, lead.Where)
		if reason != "" && slices.ContainsFunc(same, func(m *member) bool { return m.commonReason != lead.commonReason }) {
			reason += " (at the first one)" // some of the others have other reasons
		}
		if reason != "" {
			reason = ": " + reason
		}
		return whichOf(same, host) + " " + k.pluralText + reason + lead.Suffix
	}
	if more := len(same) - 1; more > 0 { // the kind has no words for several; no such kind sets a Suffix
		return fmt.Sprintf("%s, and %d more of this kind", lead.What, more)
	}
	return lead.What + lead.Suffix
}

// whichOf returns words for the engines, ranks or groups that several findings are about: the host if they share one, else both names if
// there are two, else only their number.
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

// namesByKind lists the names of members, grouped by the noun for them, such as engine or rank. all is the number of all names: if the list
// has fewer, the text ends with how many more there are.
func namesByKind(members []*member, all int) string {
	var nouns []string // in the order in which they first occur
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

// groupsOf returns a sentence with the decode groups of the members; empty: they have none.
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

// joinNames joins names with commas. The last name follows "and", unless there are maxNames names, so that more may be left out.
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

// nounOf returns one noun for the places of several findings, such as "engine" for prefill engines and decode engines together.
func nounOf(same []*member) string {
	noun := same[0].WhereKind
	for _, m := range same {
		bothAreEngines := strings.HasSuffix(m.WhereKind, "engine") && strings.HasSuffix(noun, "engine")
		switch {
		case m.WhereKind == noun:
		case bothAreEngines:
			noun = "engine"
		default: // one word for a group and a region together
			return "area"
		}
	}
	return noun
}

// forEachEngine returns a command that asks each engine of the members; empty: there is only one, the command asks no engine, or a name
// has characters that mean something to a shell.
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

// fillCommand fills the names of the finding into a shell command that operators may copy. The result is empty if the command needs a name
// that the finding does not have, or that has characters that mean something to a shell.
func fillCommand(text string, lead *member) string {
	rank := "" // the finding is about no rank
	if len(lead.Ranks) > 0 {
		rank = lead.Ranks[0]
	}
	names := map[string]string{ // what each placeholder stands for
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

// Incidents lists the open incidents, the most harmful first, then one incident for all unplaced findings, if there are any, and then the
// ended incidents, the latest first. An ended warning is not listed if the list has an equal warning already: Times of that entry counts
// it.
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
		if o.isOpen() && b.enginesAway && kinds[in.Kind].manyWait { // the missing engines may be the reason
			in.Next = "Bring back the engines that are down. " + in.Next
		}
		list.add(in)
	}
	if !toldUnplaced {
		list.all = append(list.all, b.summarizeUnplaced())
	}
	return list.all
}

// incidentList is a list of incidents without repeated warnings.
type incidentList struct {
	all      []Incident
	warnings map[string]int // by the text of a warning: the index in all of the first warning with it
}

// add adds an incident to the list. But if it is a warning that has ended, and an equal one is listed already, it is only counted there.
func (l *incidentList) add(in Incident) {
	if in.Severity == Warn {
		text := in.Headline + "\n" + strings.Join(in.Where, "\n")
		i, isListed := l.warnings[text]
		if isListed && in.UntilMs > 0 { // it has ended
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

// compareForList is below 0 if Incidents lists x before y: open incidents before ended ones; of the open
// ones that of a busy proxy first, which makes others doubtful, then the most harmful, then those with more
// findings, then the older ones; of the ended ones the latest first.
func compareForList(x, y *incident) int {
	switch {
	case x.isOpen() && !y.isOpen():
		return -1
	case y.isOpen() && !x.isOpen():
		return 1
	case !x.isOpen(): // both have ended
		return y.until.Compare(x.until)
	}
	return cmp.Or(firstIf(x.members[0].Kind == ProxyBusy, y.members[0].Kind == ProxyBusy),
		cmp.Compare(y.harm(), x.harm()), cmp.Compare(len(y.present()), len(x.present())), x.since.Compare(y.since))
}

// tooMuch is the kind of the incident that stands for all unplaced findings.
const tooMuch Kind = "too_much"

// summarizeUnplaced returns one incident for all unplaced findings: for these, the list was full (maxIncidents) of incidents that harm as
// much. Its id is 0, which no other incident has.
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
