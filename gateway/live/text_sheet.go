package live

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// sheet is a page of text that is being written. No line is wider than width, and none has a character that a terminal obeys.
type sheet struct {
	width int
	lines []string
}

// linesOfAText is how many lines a sentence or a command may take.
const linesOfAText = 8

// row adds one line, and cuts what does not fit.
func (s *sheet) row(format string, args ...any) {
	line := clean(fmt.Sprintf(format, args...))
	if columns(line) > s.width {
		line = cut(line, s.width-1) + "…"
	}
	s.lines = append(s.lines, strings.TrimRight(line, " "))
}

// say adds sentences in as many lines as they need, up to a bound.
func (s *sheet) say(indent int, text string) {
	for i, line := range fill(strings.Fields(clean(text)), s.width-indent-2) {
		s.lines = append(s.lines, strings.Repeat(" ", indent+2*min(i, 1))+line)
	}
}

// run adds a shell command in lines that can be copied and run as they stand. It is broken behind a space, or inside a word where
// there is none.
func (s *sheet) run(command string) {
	command = clean(command)
	quote := rune(0) // that the command is in where the line begins
	for range linesOfAText {
		if columns(command) <= s.width {
			s.lines = append(s.lines, command)
			return
		}
		used, at, space, within := 0, 0, 0, quote
		for i, r := range command {
			if used += columnsOf(r); used > s.width-2 {
				break
			}
			at = i + utf8.RuneLen(r)
			switch {
			case r == within:
				within = 0
			case within == 0 && (r == '\'' || r == '"'):
				within = r
			case within == 0 && r == ' ':
				space = at
			}
		}
		if space > 0 {
			at, within = space, 0
		}
		line, next := command[:at]+`\`, command[at:]
		if within == '\'' { // no backslash means anything in there
			line, next, within = command[:at]+`'\`, "'"+next, 0
		}
		s.lines = append(s.lines, line)
		command, quote = next, within
	}
	s.row("…")
}

// clean replaces every character that a terminal may obey. Names of models, engines and requests come from outside.
func clean(text string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r): // control characters, and those that change the direction of text
			return unicode.ReplacementChar
		}
		return r
	}, text)
}

// columns is how wide a text is at most. Some characters are as wide as two, and no table is needed to know which: all that this
// page draws by itself is one column wide, and what is taken for too wide leaves room.
func columns(text string) (n int) {
	for _, r := range text {
		n += columnsOf(r)
	}
	return n
}

// columnsOf is how many columns a character takes at most.
func columnsOf(r rune) int {
	if r < 0x1100 || r >= 0x2010 && r <= 0x2027 || r >= 0x2190 && r <= 0x21ff || r >= 0x2580 && r <= 0x259f {
		return 1
	}
	return 2
}

// cut keeps the beginning of a text.
func cut(text string, width int) string {
	for i, r := range text {
		if width -= columnsOf(r); width < 0 {
			return text[:i]
		}
	}
	return text
}

// tail keeps the end of a name, which is where names of engines differ.
func tail(name string, width int) string {
	name = clean(name)
	if columns(name) <= width {
		return name
	}
	runes := []rune(name)
	for runes = runes[max(0, len(runes)-width):]; columns(string(runes)) >= width; {
		runes = runes[1:]
	}
	return "…" + string(runes)
}

// padded fills a text up to a width with spaces.
func padded(text string, width int) string {
	return text + strings.Repeat(" ", max(0, width-columns(text)))
}

// fill puts words into lines, and breaks those that are wider than a line. If there are too many lines, the last one says so.
func fill(words []string, width int) (lines []string) {
	for len(words) > 0 {
		line, n := words[0], 1
		for n < len(words) && columns(line)+1+columns(words[n]) <= width {
			line += " " + words[n]
			n++
		}
		head := cut(line, width)
		if head != line {
			words[0] = line[len(head):]
		} else {
			words = words[n:]
		}
		if len(words) > 0 && len(lines) == linesOfAText-1 {
			return append(lines, "…")
		}
		lines = append(lines, head)
	}
	return lines
}
