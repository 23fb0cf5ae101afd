# Each section starts the program `show`, which prints its words if bash runs the section.
#### quotes
A="x  y"; B='$A'; show $A "$A" '$A' "$B" a"b c"'d e' \$A "a\"b" $'t\tn' "" 
#### defaults
N=4; unset M; E=""; show ${N:-8} ${M:-8} ${E:-e} ${E-e} ${M:+set} ${N:+set} "${M-a b}" ${M:=z} $M
#### arrays
A=(a "b c" $(echo d e)); A+=("f g"); show "${A[@]}" ${A[*]} ${#A[@]} "${A[1]}" ${A[-1]} "${A[@]:1:2}" ${#A[1]}
#### keys
declare -A S; S[7B]=32; S["x"]=2; K=7B; declare -A M=([a]=1); show ${S[7B]} ${S[$K]} ${S[x]} "${!M[@]}"
#### cut
P=/a/b.c/d.tar.gz; show ${P#*/} ${P##*/} ${P%.*} ${P%%.*} ${P/b/X} ${P//a/Y} ${P:3:4} ${P: -2} ${#P}
#### cases
A=Abc; show ${A,,} ${A^^} ${A/b*/}
#### sums
A=7; show $((A*2+1)) $((A/2%3)) $((-A/2)) $(( (A+1) * 4 )) $((A>3?1:0)) $((2**10)) $((0x10)); ((A++)); let B=A*2; show $A $B $((A<<1))
#### if
for m in a b c; do if [ $m = a ]; then T=1; elif [[ $m == b* && -n "$m" ]]; then T=2; else T=3; fi; show $m $T; done
#### tests
N=8; [ $N -gt 4 -a $N -lt 9 ] && show and; [[ $N =~ ^[0-9]+$ ]] && show number; [[ ! $N == 9 ]] && show not
        [[ -z "" || $N -eq 1 ]] && show or; test "$N" != 8 || show eight; [ ! "$N" = "9" ] && show ne; (( N > 4 )) && show sum
        [[ " 1 8 " =~ " $N " ]] && show in; [[ abc == a?c ]] && show pattern; [[ "a b" = "a b" ]] && show text
        H=node12; [[ $H =~ ^[a-z]+[[:digit:]]+$ ]] && show class; [[ $H =~ [^[:alnum:]] ]] || show none; E='a b'; show "${E//[[:space:]]/_}"
#### case
for s in 345M 1.3B x-y z; do case "$s" in "345M") show one;; 1.*|2.*) show two;; *-*) show three;; *) show rest;; esac; done
#### functions
f() { local a=$1; shift; show f $a "$@" $#; return 0; }; function g { f g "$@"; }; f 1 "2 3"; g; show ${a-none}
#### arguments
set -- --data=/d --size 3 "x y"; while [ $# -gt 0 ]; do case $1 in --*=*) show ${1#*=};; --size) show size $2; shift;; *) show "$1";; esac; shift; done
#### getopts
for para in "--a=1" "--b=2"; do if [[ $para == --a* ]]; then a=`echo ${para#*=}`; fi; done; show $a
#### loops
for ((i=0; i<3; i++)); do for j in {1..2} a{x,y} {0..0}; do show $i $j; [ $j = 2 ] && break; done; done; i=0; until [ $i -ge 2 ]; do i=$((i+1)); [ $i = 1 ] && continue; show $i; done
#### substitution
A=$(echo "a b"; echo c); B=`dirname /x/y/z.sh`; show "$A" $A $B $(basename /x/y.sh .sh) $(seq 2 4) $(expr 3 + 4) "$(printf "%s-%d" a 3)"
#### filters
show $(echo "3 * 4" | bc) $(echo "a:b:c" | cut -d: -f2) $(echo "--x=1" | sed "s/--x=//") $(echo "1.5 * 4" | bc)
#### here
A=3; cat > f.txt <<EOT
line $A '$A' "q" $((A+1))
EOT
cat <<'EOT' >> f.txt
raw $A
EOT
show "$(cat f.txt)"; cat f.txt | sed 's/raw/RAW/' > g.txt; show "$(cat g.txt)" 
#### eval
O="--a 1"; O="$O \
 --b 'x y'"; CMD="show first $O"; eval $CMD; $CMD; bash -c "show inner \$1" x y; X=1 show env
#### subshell
A=1; (A=2; show $A); { A=3; show $A; }; show $A; true && show yes; false || show no; ! false && show negated
#### appended
C=""; C+="show --a "; C+=" --b"; if [[ ! -z "$NOT_SET_AT_ALL" ]]; then C+=" --c"; fi; $C
#### indirect
A=B; B=7; show ${!A}; L="1,2,3"; IFS_=x; show ${L//,/ } "${L//,/ }" ${L%%,*}
#### comments
show a # b 'c
# d "
show e#f; show \
  g \
  h
#### declare
export A=1 B="x y"; readonly C=3; declare D=4; local_=5; show $A "$B" $C $D; unset A; show ${A-gone}
#### mixed
OPTS=(--x); [ -n "yes" ] && OPTS+=(--y "z w"); show "${OPTS[@]}" "${NONE[@]}" ${OPTS[@]/--/-}
#### exit
if [ -z "" ]; then show before; exit 0; fi; show after
#### joined
set -- a b; A=x/$1; show y/$2 $A:$1 "$A/$2" z-$1.$2 $1$2 ${1}$2
